"""`python -m shardwell` is `shardwell`."""

from shardwell.cli import main

if __name__ == "__main__":
    main()
