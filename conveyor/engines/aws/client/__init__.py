"""The client of the AWS APIs: transport, signing, retries, usage."""
