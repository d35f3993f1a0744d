"""What a release says of itself."""
