"""What wraps every request: access control and disconnects."""
