"""What the parts of an installation on Ray know of each other, and how its pools follow their load.

Imports neither torch nor the workers: its policy runs inside Serve's controller.
"""
