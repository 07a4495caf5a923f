"""What only the store on DynamoDB has: what no emulator does to it, and its layout."""
