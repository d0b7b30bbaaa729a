"""What is wrong with the files of a model."""


class WeightsError(ValueError):
    """A file that is broken, or does not hold what the model needs. The message names file and field."""
