"""A fault matrix: every fault, at every step of the protocol, in every part of a real installation."""
