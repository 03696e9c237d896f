"""What a run of either loop needs: checkpoints, metrics, hosts, preemption, its identity and its record."""
