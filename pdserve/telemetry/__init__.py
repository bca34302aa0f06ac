"""What the parts tell operators about themselves."""
