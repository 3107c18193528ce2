// The ring as one file: its sources share so many headers that apart they take twice as long under a sanitizer.
#include "../src/frame.cpp"
#include "../src/mac.cpp"
#include "../src/quantise.cpp"
#include "../src/quantise_wide.cpp"
#include "../src/ring.cpp"
#include "../src/ring_delivery.cpp"
#include "../src/ring_exchange.cpp"
#include "../src/ring_workers.cpp"
