"""Rules on tokens, exact under speculation: penalties, bans, constraints."""
