"""The node: holds one stage of a model and trains it together with strangers."""
