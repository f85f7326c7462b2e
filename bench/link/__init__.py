"""One stream between two processes on loopback, ours beside others: how much goes through, how fast the answer comes back."""
