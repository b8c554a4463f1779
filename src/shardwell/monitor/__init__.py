"""What people watch while a model trains: lines of progress, a bar, profiles, and metrics for other programs.

Only rank 0 has a monitor, and only if the configuration asks for output. A monitor takes part in no collective, and
reads a value of the device only when a line is due. `shardwell.monitor.monitor` is its centre.
"""
