"""One file for each library that drives a training loop: Accelerate, Lightning, Ray. None is imported unasked."""
