"""The order of a step: the scheduler of collectives, its hooks on the model, the reducer and the trace."""
