"""What we measure.  `python -m bench` lists the benches; nothing in `wire` or `plnode` imports this package."""
