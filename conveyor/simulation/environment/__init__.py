"""What surrounds the service: sites, the scraping gateway, webhook receivers, HTTP requests without
sockets, and special conditions of a world."""
