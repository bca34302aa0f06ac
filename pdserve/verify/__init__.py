"""`pdserve verify`: one input through two configurations, compared layer by layer."""
