"""What only the embedded engine has: row format, migrations, lock, recovery, group commit."""
