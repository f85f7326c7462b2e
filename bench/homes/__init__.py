"""What home routers cost a swarm: tokens a second behind them beside the same swarm with public addresses."""
