"""What may be submitted: URLs, parameters, lists, and their admission."""
