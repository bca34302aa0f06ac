"""`pdserve doctor`: looks at a deployment through its router, and says what is wrong and what to do."""
