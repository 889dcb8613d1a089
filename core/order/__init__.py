"""Orders: which sample is read at which position of an epoch, a pure function of size, seed and epoch.

Nothing is drawn and nothing is kept: any slice of any epoch can be asked for at any time, at the same cost, so resuming
in the middle of an epoch is a jump. Everything is fixed-width integer arithmetic on keys of :mod:`midepoch.order.keys`;
golden vectors in the tests pin each order, because saved positions mean nothing under another.
"""

from .epochs import MAXIMUM_SIZE, EpochOrder, Order
from .shuffled import Sequential, Shuffled
from .windows import Windowed

__all__ = ["MAXIMUM_SIZE", "EpochOrder", "Order", "Sequential", "Shuffled", "Windowed"]
