"""What the AWS engine alone has: signatures, metering, retries, and two transports that agree."""
