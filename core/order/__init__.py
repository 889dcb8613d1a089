"""Orders: which sample is read at which position of an epoch, a pure function of size, seed and epoch.

An order uses no random generator and keeps no state: any slice of any epoch can be read at any time, at the same cost.
So resuming in the middle of an epoch is a jump. Everything is fixed-width integer arithmetic on keys of
:mod:`midepoch.order.keys`. Golden vectors in the tests pin each order, because a changed order would invalidate saved
states.
"""

from .endless import Endless
from .epochs import MAXIMUM_SIZE, EpochOrder, Order
from .shuffled import Sequential, Shuffled
from .windows import Windowed

__all__ = ["MAXIMUM_SIZE", "Endless", "EpochOrder", "Order", "Sequential", "Shuffled", "Windowed"]
