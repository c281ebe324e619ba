"""The queue of rollouts in Redis: `rollout_queue` is the API's side, `deliveries` the worker's."""
