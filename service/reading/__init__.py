"""What the API keeps of each run, so that an answer costs what has changed since the last one."""
