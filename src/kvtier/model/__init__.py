"""What a model file says, before anything is loaded: header, shape, name, and what its cache takes."""
