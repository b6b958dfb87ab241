"""Many runners: on threads of this process (`threads`), or in processes (`processes`)."""
