"""What the AWS engine alone has: signatures, metering, retries, and two planes that agree."""
