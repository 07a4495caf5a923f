"""What one engine alone has."""
