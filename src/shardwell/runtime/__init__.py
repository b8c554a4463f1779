"""When things happen in a step: the scheduler of collectives, its hooks on the model, and the trace."""
