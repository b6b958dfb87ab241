"""Many runners at work: on threads of this process (`threads`), or in processes (`processes`)."""
