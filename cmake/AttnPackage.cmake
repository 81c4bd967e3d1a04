# `cpack -G DEB` in a build folder configured with -DCMAKE_INSTALL_PREFIX=/usr
# makes libattn<major> and libattn-dev.
set(CPACK_PACKAGE_NAME libattn)
set(CPACK_PACKAGE_VENDOR "The libattn developers")
set(CPACK_PACKAGE_CONTACT "The libattn developers <libattn@localhost>")
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGING_INSTALL_PREFIX "${CMAKE_INSTALL_PREFIX}")
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL runtime dev)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME "libattn${PROJECT_VERSION_MAJOR}")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_DEV_PACKAGE_NAME libattn-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
    "libattn${PROJECT_VERSION_MAJOR} (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEV_PACKAGE_RECOMMENDS "libopenblas-dev | libblas-dev")
string(CONCAT attn_deb_text
    "libattn computes softmax(scale Q K^T + mask) V, and the layers around\n"
    "it, in float32 and float64. All matrix products go through CBLAS.")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "${attn_deb_text}")
set(CPACK_COMPONENT_DEV_DESCRIPTION
    "${attn_deb_text}\n.\nThis package holds what programs are built with.")
include(CPack)
