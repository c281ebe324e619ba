"""The service: HTTP API, queue, spool, registry, worker, drift monitor, metrics, page, command line."""
