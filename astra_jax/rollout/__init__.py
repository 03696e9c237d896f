"""Episodes: the policy interface, the embedded engine behind it, the turn loop against the sandbox, and the reward."""
