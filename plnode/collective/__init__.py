"""What the replicas of one stage do together: agree on a round, reduce their gradients."""
