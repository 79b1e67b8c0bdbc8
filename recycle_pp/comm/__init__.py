"""Messages between workers that survive the death of any of them: groups, their abort, what is kept for a resend."""
