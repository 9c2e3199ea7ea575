// Small functions that the host and the device both run: a backend's compiler defines HOSTDEV for its own keywords.
#ifndef MOE_HOSTDEV_H
#define MOE_HOSTDEV_H
#ifndef HOSTDEV
#define HOSTDEV static inline
#endif
#endif
