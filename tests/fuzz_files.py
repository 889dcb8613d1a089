"""x"""
from typing import Any
TARGETS: dict[str, Any] = {}
FUZZERS: dict[str, Any] = {}
