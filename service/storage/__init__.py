"""What lies on disk and in Redis: paths, queue, spool, registry of drafters, registered runs, reports."""
