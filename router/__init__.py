"""The door of the house: which workers fit, which to use, and one request from end to end."""
