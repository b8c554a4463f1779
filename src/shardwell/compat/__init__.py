"""Keys of configuration files that other libraries, or earlier versions, wrote: data for `shardwell.config`."""
