"""The command line, and the processes that `draftalign up` keeps alive."""
