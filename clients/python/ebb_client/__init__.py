"""Asks `ebbd`, the daemon that returns unused memory of running virtual machines to their host."""

from . import shapes
from .client import Client
from .error import EbbError
from .shapes import *  # noqa: F401,F403

__all__ = ["Client", "EbbError", *shapes.__all__]
