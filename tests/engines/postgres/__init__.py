"""What the Postgres engine alone has."""
