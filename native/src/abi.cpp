#include "bloomery.h"

int32_t bloomery_abi_version(void) { return BLOOMERY_ABI_VERSION; }
