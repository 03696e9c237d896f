"""Infrastructure shared by both training loops: checkpoints, metrics, hosts, preemption, run identity and record."""
