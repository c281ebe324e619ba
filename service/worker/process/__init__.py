"""The worker process: `worker` takes turns between the runs, the other files are its parts."""
