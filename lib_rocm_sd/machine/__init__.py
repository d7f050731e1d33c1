"""AMD machine code as text: what stands in a kernel's loops, and what that bounds."""
