"""The engine and `initialize`, the entry points for users."""

from shardwell.engine.engine import Engine
from shardwell.engine.initialization import Initialized, initialize
from shardwell.engine.units import UnitInfo
from shardwell.runtime.trace import Trace, TraceAction, TraceEvent

__all__ = ["Engine", "Initialized", "Trace", "TraceAction", "TraceEvent", "UnitInfo", "initialize"]
