"""Training through a pipeline of nodes beside the ways of training the same model on the same cores."""
