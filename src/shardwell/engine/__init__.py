"""When things move, and what the user holds."""

from shardwell.engine.engine import Engine
from shardwell.engine.initialization import Initialized, initialize
from shardwell.runtime.trace import Action, Event, Trace

__all__ = ["Action", "Engine", "Event", "Initialized", "Trace", "initialize"]
