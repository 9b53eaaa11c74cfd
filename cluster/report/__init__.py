"""What a person is told of a model, a machine or a group."""
