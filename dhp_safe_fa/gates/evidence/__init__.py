"""What the gates said, stored under audits/ with the hashes it is about; and what README may say of it."""
